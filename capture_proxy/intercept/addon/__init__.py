"""The intercepting proxy: a program on mitmproxy, in the environment that holds mitmproxy and nothing of ours.

It imports only mitmproxy and the standard library, is started by `launch` as `python -I FOLDER`, gets its orders as one
line of JSON on stdin, says on the ready pipe where it listens, and ends when stdin or its owner does. Whatever goes
wrong in here closes the connection: no mistake may become a way out. `program` is its life, `hooks` decides on each
request, `gateway` is what it asks and tells ours, `hosts` reads the allow-list. Its modules import each other
relatively: there it is a package of its own (`__main__`), and the packages around this folder are not to be had.
"""
