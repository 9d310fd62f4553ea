"""One engine for many callers: requests come and go while others run."""
