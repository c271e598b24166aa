"""The one measuring loop: subjects on windows, scores, the store; `scoring.py` refuses a codec that moves nothing."""
