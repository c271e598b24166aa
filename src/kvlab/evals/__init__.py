"""Tasks of lm-evaluation-harness with something done to the KV cache, and evidence for the gate from what they say.

Kept apart by what they need: `results` and `evidence` read files of results and never load torch, `tasks` and `lm`
speak to lm-evaluation-harness and know no engine, `hf` and `vllm` each know one engine and nothing of tasks.
"""
