"""Several worker processes on one port. A gateway of one process has nothing of this but `peers.Alone`.

`supervisor` starts and watches them, `member` is the process of one, `control` the way between the two, `peers` what a
worker needs of the others. They share `places` in memory, and show `merged` metrics. Nothing is imported here: `places`
and `peers` belong to every gateway.
"""
