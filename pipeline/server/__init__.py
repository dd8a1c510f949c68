"""The HTTP face of an engine. Import `pipeline.server.app` or `pipeline.server.run`.

Nothing is imported here, so that `pipeline.server.settings` costs `check` nothing.
"""
