"""Every option and setting, declared once: option records, value parsers, and one dataclass per group of settings."""
