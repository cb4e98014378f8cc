"""The steps. A released one is never edited: a database that has taken it does not take it again."""
