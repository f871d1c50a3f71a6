package main

// withoutBodies is a filter of the log that omits the bodies of API requests and responses, which client-go logs at -v=8
// and above. The response to a TokenRequest contains talos-ccm's token, and a TokenReview the token of a client. A logger
// in the context of a request would not do: the library that sends TokenReviews replaces the context.
type withoutBodies struct{}

// Filter implements klog.LogFilter.
func (withoutBodies) Filter(args []any) []any { return args }

// FilterF implements klog.LogFilter.
func (withoutBodies) FilterF(format string, args []any) (string, []any) { return format, args }

// FilterS implements klog.LogFilter.
func (withoutBodies) FilterS(message string, keysAndValues []any) (string, []any) {
	if message == "Request Body" || message == "Response Body" {
		keysAndValues = []any{"body", "<omitted>"}
	}

	return message, keysAndValues
}
