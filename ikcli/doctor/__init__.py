"""`ik doctor` and `ik devices`: facts about a machine, its measured roofline, and advice."""
