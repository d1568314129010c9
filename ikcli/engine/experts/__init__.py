"""Keep routed experts in VRAM, RAM and on disk, and move them between steps."""
