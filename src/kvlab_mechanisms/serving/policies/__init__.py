"""What a service decides, one policy a file: pure state machines that are told the time and touch nothing else."""
