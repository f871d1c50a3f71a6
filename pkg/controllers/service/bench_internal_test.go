package service

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// ports gives a Service TCP ports in ascending order.
func ports(first, count int32) func(*corev1.Service) {
	return func(service *corev1.Service) {
		service.Spec.Ports = nil
		for i := range count {
			service.Spec.Ports = append(service.Spec.Ports, corev1.ServicePort{Protocol: corev1.ProtocolTCP, Port: first + i})
		}
	}
}

// many returns equal Services that are older than those of the benchmark.
func many(count int, changes ...func(*corev1.Service)) (list []*corev1.Service) {
	for i := range count {
		list = append(list, newService(fmt.Sprint("a", i), changes...))
	}

	return list
}

// BenchmarkDecide measures a pass over 1,000 Services with three ports each, on 250 Nodes, and over these and the Services
// of another user. The time relative to the first pass is what this user costs.
func BenchmarkDecide(b *testing.B) {
	var first float64

	onOneNode := annotation(AnnotationNodeSelector, "name=node-0")
	selector := func(text string) func(*corev1.Service) { return annotation(AnnotationNodeSelector, text) }

	for _, test := range []struct {
		name     string
		services []*corev1.Service
	}{
		{"none", nil},
		{"10 with 10000 ports", many(10, ports(11_000, 10_000))},
		{"100 with the same 1000 ports", many(100, ports(11_000, 1000))},
		{"100 with 1000 ports of a Service on one Node", append(many(1, ports(11_000, 1000), onOneNode), many(100, ports(11_000, 1000))...)},
		{"10 with selectors of 240 KB", many(10, onPort(1), selector("name in (node-0"+strings.Repeat(",a", 120_000)+")"))},
		{"10 with selectors of 16 KB", many(10, onPort(1), selector("name in (node-0"+strings.Repeat(",a", 8000)+")"))},
		{"10 with 5000 requirements", many(10, onPort(1), selector("!a"+strings.Repeat(",!a", 5000)))},
	} {
		b.Run(test.name, func(b *testing.B) {
			s := snapshot{nodes: candidates(250), services: test.services, endpoints: noEndpoints, selectors: map[string]parsedSelector{}}
			for i := range int32(1000) {
				s.services = append(s.services, newService(fmt.Sprint("s", i), ports(30_000+3*i, 3)))
			}

			for _, d := range s.decide() {
				d.service.Status.LoadBalancer.Ingress = d.ingress
			}

			b.ReportAllocs()

			for b.Loop() {
				s.decide()
			}

			perOp := b.Elapsed().Seconds() / float64(b.N)
			if test.services == nil {
				first = perOp
			}

			b.ReportMetric(perOp/first, "xFirst")
		})
	}
}
