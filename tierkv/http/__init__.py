"""HTTP parts that nodes and gateways share: sockets, callers, bodies, routes, error answers."""
