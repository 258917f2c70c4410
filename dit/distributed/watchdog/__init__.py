"""No process waits for ever for another one that has died or stands still.

The main thread calls `heartbeat` with what it begins; inside `monitor.watchdog`, threads of all
processes tell each other, and end the run where one is silent for too long.

main_thread  what the main thread tells the others
monitor      the threads of one process: they report, judge, and end the process
verdict      reports of all processes -> which one has died, or holds up the others
"""

from dit.distributed.watchdog.main_thread import PeerError, heartbeat, is_lost_peer, waiting_for
