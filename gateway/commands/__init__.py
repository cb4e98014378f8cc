"""Commands on tenants, keys, usage and audit. What is slow to import is imported where it is used."""
