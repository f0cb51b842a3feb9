"""Files of other frameworks, written from a configuration. A writer a framework."""
