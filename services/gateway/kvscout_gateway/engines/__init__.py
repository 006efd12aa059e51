"""The engines that run requests: how each is asked, read, judged and waited for."""
