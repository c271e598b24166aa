"""vLLM's pages hold a recipe's coded bytes: `rows.py` says how many, `worker.py` tells vLLM, `backend.py` attends."""
