"""The client's side of the wire. `protocol` is a connection, `cycle` one request on it and its answer.

`handshake` has TLS ready before the first byte of HTTP, `crowd` counts connections, `cors` knows whose pages may call,
`routes` which requests are the edge's own. Nothing is imported here: the cycle belongs to the path of a request too.
"""
