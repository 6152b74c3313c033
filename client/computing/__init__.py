"""What to do on a miss: claim a key, wait for the process that computes it, or have it fetched from other hosts.

It owns the states of a claim, the steps of computing once, and runs of fetches from the remote store. It may import
`link`, `reading` and `writing`, `arguments` and `threads`.
"""
