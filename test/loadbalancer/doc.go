// Package loadbalancer tests the load balancer addresses of Services with the real kube-proxy: two Nodes and a client
// in network namespaces of their own. It requires root; run it with `make e2e`.
package loadbalancer
