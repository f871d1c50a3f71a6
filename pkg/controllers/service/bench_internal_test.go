package service

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
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

// BenchmarkDecide measures a pass over 1,000 Services with three ports each on 1,000 Nodes, and over these and the Services
// of another user.
func BenchmarkDecide(b *testing.B) {
	selector := func(text string) func(*corev1.Service) { return annotation(AnnotationNodeSelector, text) }

	for _, test := range []struct {
		name     string
		services []*corev1.Service
	}{
		{"none", nil},
		{"10 with 10000 ports", many(10, ports(11_000, 10_000))},
		{"10 with 10000 ports, not managed", many(10, ports(11_000, 10_000), withoutClass)},
		{"10 with 1000 ports", many(10, ports(11_000, 1000))},
		{"100 with the same 1000 ports", many(100, ports(11_000, 1000))},
		{"10 with selectors of 240 KB", many(10, onPort(1), selector("name in (node-0"+strings.Repeat(",a", 120_000)+")"))},
		{"10 with selectors of 16 KB", many(10, onPort(1), selector("name in (node-0"+strings.Repeat(",a", 8000)+")"))},
		{"10 with 5000 requirements", many(10, onPort(1), selector("!a"+strings.Repeat(",!a", 5000)))},
	} {
		b.Run(test.name, func(b *testing.B) {
			s := snapshot{identity: known, nodes: candidates(1000), services: test.services, endpoints: noEndpoints}
			for i := range int32(1000) {
				s.services = append(s.services, newService(fmt.Sprint("s", i), ports(30_000+3*i, 3)))
			}

			s.afterFirstPass()
			b.ReportAllocs()

			start := cpuTime(b)

			for b.Loop() {
				s.decide()
			}

			b.ReportMetric(float64((cpuTime(b)-start).Milliseconds())/float64(b.N), "cpu-ms/op")
		})
	}
}

// afterFirstPass sets what a pass leaves for the next one.
func (s *snapshot) afterFirstPass() {
	s.selectors = map[string]*nodeSelector{}

	for _, d := range s.decide() {
		s.selectors[d.service.Namespace+"/"+d.service.Name] = d.selector
		d.service.Status.LoadBalancer.Ingress = d.ingress
	}
}

// cpuTime returns the CPU time of the process, including garbage collection.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()

	var usage syscall.Rusage

	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &usage))

	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
