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
	"k8s.io/utils/clock"

	"github.com/talos-ccm/talos-ccm/test/ctest"
)

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
			before := ctest.Metrics(t)
			err := c.call()
			after := ctest.Metrics(t)

			require.Equal(t, c.code != codes.OK, err != nil, err)

			failed := 0.0
			if c.code != codes.OK {
				failed = 1
			}

			for key, want := range map[string]float64{
				"talosccm_api_requests_total " + c.code.String() + " " + c.method: 1,
				"talosccm_api_request_errors_total " + c.method:                   failed,
				"talosccm_api_request_duration_seconds " + c.method:               1,
			} {
				assert.Equal(t, want, after[key]-before[key], key)
			}
		})
	}
}

func TestMetrics_CountCallsToStoppedMachineAsUnavailable(t *testing.T) {
	s := newSite(t, clock.RealClock{})
	st := dial(t, s.reader(t), s.worker)

	require.NoError(t, s.worker.Stop(t.Context()))

	before := ctest.Metrics(t)

	require.Error(t, st.Watch(t.Context(), nodenamePointer(), make(chan state.Event, 1)))
	require.Error(t, errorOf(nodename(t, st)))

	after := ctest.Metrics(t)

	for _, method := range []string{"Get", "Watch"} {
		key := "talosccm_api_requests_total " + codes.Unavailable.String() + " " + method
		assert.Equal(t, 1.0, after[key]-before[key], key)
	}
}
