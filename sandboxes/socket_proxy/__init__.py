"""A filter in front of a Docker engine's socket: what our Docker backend asks for passes, and nothing else does.

Stands alone (the standard library and h11), because its image holds nothing more, and it alone may open the engine's
socket.
`__main__` is the program, `door` the wire, `routes` which calls there are, `bodies` what containers may be made of.
"""
