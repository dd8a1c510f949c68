"""The engine in a process of its own (`server.isolate=true`): one that crashes or is killed for memory takes
no open port with it.

`wire` says what crosses between the two, `child` is the engine's side, `engine` and what it is made of the
server's, which imports no MLX.
"""
