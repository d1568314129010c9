"""Template families: how models write reasoning and tool calls."""
