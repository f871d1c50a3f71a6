package talosapi_test

import (
	"testing"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/resources/k8s"
	"github.com/siderolabs/talos/pkg/machinery/resources/secrets"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/utils/clock"
)

// sample identifies a time series.
type sample struct{ metric, name, code string }

// samples returns the values of all time series; for histograms, the count.
func samples(t *testing.T) map[sample]float64 {
	t.Helper()

	families, err := legacyregistry.DefaultGatherer.Gather()
	require.NoError(t, err)

	values := map[sample]float64{}

	for _, family := range families {
		for _, metric := range family.GetMetric() {
			s := sample{metric: family.GetName()}

			for _, label := range metric.GetLabel() {
				switch label.GetName() {
				case "method", "request":
					s.name = label.GetValue()
				case "code":
					s.code = label.GetValue()
				}
			}

			values[s] = metric.GetCounter().GetValue() + metric.GetGauge().GetValue() + float64(metric.GetHistogram().GetSampleCount())
		}
	}

	return values
}

// errorOf returns the error of a call.
func errorOf[T any](_ T, err error) error { return err }

func TestMetrics_CountCallsByMethodAndCode(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	st := s.socket.Reader

	list := func(typ resource.Type, namespace resource.Namespace) func() error {
		return func() error {
			return errorOf(st.List(t.Context(), resource.NewMetadata(namespace, typ, "", resource.VersionUndefined)))
		}
	}
	get := func(pointer resource.Pointer) func() error {
		return func() error { return errorOf(st.Get(t.Context(), pointer)) }
	}
	watch := func(pointer resource.Pointer) func() error {
		return func() error { return st.Watch(t.Context(), pointer, make(chan state.Event, 1)) }
	}

	for name, c := range map[string]struct {
		call   func() error
		method string
		code   codes.Code
	}{
		"get":             {get(nodenamePointer()), "Get", codes.OK},
		"get of nothing":  {get(resource.NewMetadata(k8s.NamespaceName, k8s.NodenameType, "nowhere", resource.VersionUndefined)), "Get", codes.NotFound},
		"list":            {list(k8s.NodenameType, k8s.NamespaceName), "List", codes.OK},
		"empty list":      {list(k8s.NodeStatusType, k8s.NamespaceName), "List", codes.OK},
		"forbidden list":  {list(secrets.KubernetesType, secrets.NamespaceName), "List", codes.PermissionDenied},
		"watch":           {watch(nodenamePointer()), "Watch", codes.OK},
		"forbidden watch": {watch(secrets.NewKubernetes().Metadata()), "Watch", codes.PermissionDenied},
	} {
		t.Run(name, func(t *testing.T) {
			before := samples(t)
			err := c.call()
			after := samples(t)

			require.Equal(t, c.code != codes.OK, err != nil, err)

			failed := 0.0
			if c.code != codes.OK {
				failed = 1
			}

			for s, want := range map[sample]float64{
				{"talosccm_api_requests_total", c.method, c.code.String()}: 1,
				{"talosccm_api_request_errors_total", c.method, ""}:        failed,
				{"talosccm_api_request_duration_seconds", c.method, ""}:    1,
			} {
				assert.Equal(t, want, after[s]-before[s], s)
			}
		})
	}
}

func TestMetrics_CountCallsToStoppedMachineAsUnavailable(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	st := dial(t, s.reader(t), s.worker)

	require.NoError(t, s.worker.Stop(t.Context()))

	before := samples(t)

	require.Error(t, st.Watch(t.Context(), nodenamePointer(), make(chan state.Event, 1)))
	require.Error(t, errorOf(nodename(t, st)))

	after := samples(t)

	for _, method := range []string{"Get", "Watch"} {
		s := sample{"talosccm_api_requests_total", method, codes.Unavailable.String()}
		assert.Equal(t, 1.0, after[s]-before[s], s)
	}
}
