"""Several models behind one port: each is served by a process of its own, loaded when a request asks for it."""
