from tierkv.compiled import find

__path__[:0] = find("storage")
