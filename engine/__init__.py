"""What an inference engine runs to use the store: hashing, costs, decisions, plans, plugins.

May import kvstore's types, errors and client; kvstore never imports `engine`.
"""
