"""Learning from the samples of a step: advantages, the updates of actor and critic, the reference policy."""
