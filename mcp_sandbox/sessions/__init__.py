"""The life of each chat's sandbox, and the calls in it. Knows neither MCP nor any engine.

manager.py   finds the session of a chat    session.py    all calls in it
gate.py      checks and records each call   approvals.py  questions to the user, answers
hold.py      opens and closes one sandbox   ways.py, warm.py  make it, at a call or early
records.py   keeps and locks chats on disk  slots.py      limits how many sandboxes are open
rooms.py     what all holds share; limits   cleaning.py   ends idle sandboxes, removes old files
processes.py background, previews.py ports, doors.py network, skills.py and pinning.py skills,
recording.py the audit, news.py notices for the agent, settings.py what a sandbox is made from
"""
