"""Models made out of GGUF files: read and checked, dequantised, in folders that every engine reads."""
