"""What compressing the KV cache buys when many ask at once: a simulated service, and policies that pace a real one."""
