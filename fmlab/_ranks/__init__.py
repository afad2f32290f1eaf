"""What stands behind `fmlab.ranks`: the processes, the messages between them, the log of collectives.

server.py     a small process that imports torch once and forks a rank on request (in a second or less)
forking.py    the parent's end of the server
interrupt.py  an interrupt that waits until it can do no harm
transport.py  the seam: how messages reach the ranks and how ranks are started and ended on this host
process.py    one rank as a process of this host
fit.py        how many ranks this machine can run
worker.py     what runs in each rank: one loop that answers calls, one thread that answers questions
calls.py      the parent's side of one call: wait, watch, decide that a call cannot end, report
log.py        the collectives each rank entered, and where two ranks disagree about them
errors.py     RankError and what happened to each rank
output.py     prints and rich results, labelled by rank
pickling.py   functions and classes of scripts, notebooks and tests, by value
stack.py      the user's own lines of a stack, and the communication call it ends in
names.py      the names a notebook cell reads
sending.py    the notebook's names, sent to the ranks when they changed

On a cluster:
cluster.py    the transport for many hosts: the head's end
listener.py   the head's port; link.py  one host as the head sees it; inbox.py  what has come from all
agent.py      what runs on each host; seat.py  its threads for one rank; command.py  `fmlab ranks`
channel.py    proved, ordered messages between them; token.py  the secret; pulse.py  signs of life
rendezvous.py where the ranks of many hosts meet
"""
