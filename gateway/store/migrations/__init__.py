"""How the tables came to be, one file a step. Run by `gateway.store.migrate`, never by hand."""
