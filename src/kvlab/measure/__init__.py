"""The one measuring loop: subjects on windows, their scores, and the store of what was measured."""
