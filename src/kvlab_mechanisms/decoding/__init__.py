"""From logits to tokens: sampling, speculation with an exact verifier, parallel samples, watermark, schema, probe."""
