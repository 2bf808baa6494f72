"""What a model's files say of its tokens: which are control tokens, which end a turn, how a chat is written.

Workers stop at such tokens and the gateway hides them, so both read them with this code. Torch-free. Next:
`roles.py`.
"""
