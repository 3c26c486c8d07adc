"""Where a CPU's freed memory goes: the pool against the allocators that people preload."""
