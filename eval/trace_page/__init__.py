"""A page on which one traced generation can be read token by token; see docs/trace_page.md."""
