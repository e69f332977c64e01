"""The load generator of `octavo bench`: asks a server, over gRPC or any OpenAI server's HTTP, and says how it answered.

Needs no more than the client does. Knows what a client sees; nothing of the services' insides.
"""
