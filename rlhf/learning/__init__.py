"""Learns from a step's samples: advantages, the updates of actor and critic, the reference policy."""
