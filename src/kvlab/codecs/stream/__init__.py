"""What is written: packed codes, frames, files of caches and of tensors."""
