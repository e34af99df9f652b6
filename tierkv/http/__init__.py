"""HTTP as nodes and gateways serve it alike: sockets, callers, bodies, routes and problems."""
