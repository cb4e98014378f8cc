"""Prompts and answers in the log: kept while a request runs (`log.py`), carried to a child process (`courier.py`), and
read, masked and made into lines there (`__main__.py`, `record.py`).

Nothing is imported here, so that the child stays small.
"""
