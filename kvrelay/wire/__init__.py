"""Values to protos and back: the only code that knows both. One module for each family of messages, both directions.

Here is what clients see; families whose values are the engine's are in `engine/`. Nothing here decides or checks more
than that a message can be read. A test fails when a proto gains a field that nobody converts.
"""
