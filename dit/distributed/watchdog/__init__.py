"""The watchdog ends a run in which a process has died or stands still.

The main thread calls `heartbeat` with the name of each activity. Inside `monitor.watchdog`, threads
of all processes exchange these, and end the run if a process is silent for too long.

main_thread  the activity that the main thread reports
monitor      the threads of one process, which report, judge, and end the process
verdict      finds in the reports of all processes one that has died, or blocks the others
"""

from dit.distributed.watchdog.main_thread import PeerError, heartbeat, is_lost_peer, waiting_for
