"""One model served by several processes, on this machine or on nodes of Ray, behind one port."""
