"""HTTP for nodes and gateways alike: sockets, callers, bodies, routes and error answers."""
