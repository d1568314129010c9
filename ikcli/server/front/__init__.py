"""One port in front of several `ik serve` processes: several models, or several replicas of one model.

A supervisor manages the processes (`supervisor.py`). Its policy is `models.py` (load on demand, evict) or `replicas.py`
(keep all alive, restart in turn, choose by prefix). Both share the rest: starting a process (`child.py`), querying it
(`upstream.py`), forwarding requests to it (`forward.py`), the application (`app.py`) and the server loop (`server.py`).
"""
