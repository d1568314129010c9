"""One port in front of several processes that are `ik serve` themselves: several models, or several replicas of one.

A supervisor keeps the processes (`supervisor.py`); its policy is `models.py` (load on demand, evict) or `replicas.py`
(keep all alive, restart in turn, choose by prefix). Both share the rest: how a process is started (`child.py`), asked
(`upstream.py`) and passed requests (`forward.py`), the application (`app.py`) and the server loop (`server.py`).
"""
