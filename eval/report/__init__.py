"""Folders of measured points -> one page that opens from its file, with its figures and their numbers beside it."""
