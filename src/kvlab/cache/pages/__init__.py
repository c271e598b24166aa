"""Pages that hold coded bytes as rows (`token_bytes.py`): in vLLM (`worker.py`, `backend.py`) and on a GPU."""
