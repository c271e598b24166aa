"""What happens to K and V in memory: pages, compaction, a host tier, and the bytes that go to another process."""
