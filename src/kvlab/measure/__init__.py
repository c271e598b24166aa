"""The one measuring loop: subjects on windows, scores, the store; `subjects.py` refuses a codec that moves nothing."""
